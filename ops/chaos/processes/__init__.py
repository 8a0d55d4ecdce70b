"""Real processes of a running service are killed or stopped under load, and the laws of the service are checked."""
