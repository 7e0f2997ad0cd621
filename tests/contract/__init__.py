"""What the store promises: every test runs on SQLite and on PostgreSQL."""
