"""The part of a prefill engine: leases, announcements, what D asks."""
