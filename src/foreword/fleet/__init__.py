"""Many engines behind one server: a request goes to the replica that has most of it, and outlives a replica's death.

Knows the routing of `cluster/`, the events of `events/` and the server's door to engines. Only `ray_serve.py` and
`ray_router.py` know Ray.
"""
