"""Resources: what clients have the server keep under a name, until a time that they choose."""
