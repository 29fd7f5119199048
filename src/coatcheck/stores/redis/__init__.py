"""The Redis store: `store` is the entry, the other modules are its parts."""
