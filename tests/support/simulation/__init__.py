"""A prefill engine, decode engines and the network between them, simulated on one thread and one clock.

The connector's decisions are the real ones: ``LeaseService``, ``Consumer``, ``Renewals``, ``Pulls``,
``Pull``, and the messages in their wire format. Simulated are vLLM's schedulers, the threads, the sockets, and
memory, whose blocks hold stamps that say which block of which prompt they are.
"""
