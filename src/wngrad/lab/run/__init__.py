"""How runs are made: the store, the workers and their supervisor, and Ray."""
