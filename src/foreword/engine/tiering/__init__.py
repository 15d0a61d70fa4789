"""Between the scheduler and the tiers: decides which blocks are loaded, stored, or computed instead."""
