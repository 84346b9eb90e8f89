"""How engines keep many requests' caches: capacity, scheduling, simulation, live metrics. No torch anywhere here."""
