"""One module for each kind of backend; a worker process imports the one it runs, and nothing else does."""
