"""Many engines behind one server. A request goes to the replica with most of its prefix, and outlives that replica.

Uses the routing of `cluster/`, the events of `events/`, and the interface by which a server calls engines. Only the
modules whose names begin with `ray_` import Ray.
"""
