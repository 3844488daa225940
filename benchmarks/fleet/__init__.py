"""What this machine cannot hold, simulated: many prefill and decode engines. ``python -m benchmarks.fleet``.

    traces          requests, in the format of the Mooncake paper's traces; a seeded generator; ``sample.jsonl``
    constants       what the simulated engines and transfers cost: measured, or assumed
    pulls           bytes and descriptors of a range of tokens, by the connector's planner
    sharing         what is shared: cores, links
    memory          an engine's blocks
    node            what P and D have in common: settings, memory, steps
    prefill         a simulated P: chunks of prompts, and leases by the connector's table
    decode          a simulated D: pulls in turn or ahead, by the connector's bounds and renewals
    simulation      x P and y D, and what became of every request
    host_memory     the modelled rule of host memory at both ends
    control         what a control message costs the real server, and when one P's server has no more time
    servers         real servers: x P and y D on this machine
    replay          sends a trace to real servers
    calibrate       measures the constants on 1P1D
    validate        compares the simulator with real runs
    scenarios       what is asked of the simulator beyond this machine
    plots           the answers as SVG; measures nothing
    __main__        the commands

Everything is simulated on one thread. The connector's decisions are made by its own code: ``layout`` plans,
``LeaseTable`` keeps leases, ``Renewals`` renews them and gives up, ``RequestAdmission`` lets them give way, and
``PullsAhead`` bounds pulls of prompts that are being computed. What is modelled is the rest: vLLM's steps, and time.
"""
