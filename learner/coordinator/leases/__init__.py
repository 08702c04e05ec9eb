"""Which server has which group, and what becomes of leases that do not come back."""
