"""Between the scheduler and the tiers: what is loaded, what is stored, and what is computed instead."""
