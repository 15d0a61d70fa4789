"""Resources: schemas and cached contents that the server keeps for clients under a name."""
