"""Many engines behind one server: each request goes to the replica that has most of it, and outlives a replica's death.

Knows the routing of `cluster/`, the events of `events/` and the server's door to engines. Ray is known to `ray_serve.py`,
`ray_router.py` and `ray_link.py` alone.
"""
