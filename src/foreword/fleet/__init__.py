"""Many engines behind one server. A request goes to the replica that has most of its prefix, and survives its death.

Uses the routing of `cluster/`, the events of `events/` and the server's door to engines. Only the modules whose names
begin with `ray_` know Ray.
"""
