"""Real processes, really killed: what was acknowledged is there afterwards."""
