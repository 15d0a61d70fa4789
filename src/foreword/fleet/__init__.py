"""Many engines behind one server: a request goes to the replica that has most of it, and outlives a replica's death.

Knows the routing of `cluster/`, the events of `events/` and the server's door to engines. Only the modules whose names
begin with `ray_` know Ray.
"""
