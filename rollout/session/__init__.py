"""A server's part in one run: leases in, finished samples out.

Reading order: session, samples_in_flight, outbox, turns_to_keep.
"""
