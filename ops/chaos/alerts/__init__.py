"""Every alert in a staged fault on a running service: when it fires, and when it clears."""
