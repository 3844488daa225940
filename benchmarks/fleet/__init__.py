"""What this machine cannot hold, simulated: many prefill and decode engines. ``python -m benchmarks.fleet``.

    traces          requests, in the format of the Mooncake paper's traces; a seeded generator
    constants       what the simulated engines and transfers cost: measured, or assumed
    links           what pulls share
    memory          an engine's blocks, and the modelled rule of host memory at both ends
    node            what P and D have in common: settings, a request's two legs, waiting
    prefill         a simulated P: chunks of prompts, and leases by the connector's table
    decode          a simulated D: pulls in turn or ahead, by the connector's bounds and renewals
    simulation      x P and y D, and what became of every request
    control         what a control message costs the real server, and how busy engines keep it
    real            a real P and a real D on this machine, and a client that sends them a trace
    calibrate       measures the constants
    validate        compares the simulator with real runs
    scenarios       what is asked of the simulator beyond this machine
    plots           the answers as SVG; measures nothing
    __main__        the commands

Everything is simulated on one thread. The connector's decisions are made by its own code: ``LeaseTable`` keeps leases,
``Renewals`` renews them and gives up, ``RequestAdmission`` lets them give way, and ``PullsAhead`` bounds pulls of
prompts that are being computed. What is modelled is the rest: vLLM's steps, and time.
"""
