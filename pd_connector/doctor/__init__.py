"""What to run on a host before it serves: ``pd-doctor``, or ``python -m pd_connector.doctor``.

    pd-doctor                                  this machine: software, protocols, memory, clock, two processes
    pd-doctor --peer HOST[:PORT]               and a running P, at its HTTP port: handshake, plan, a real pull
    pd-doctor --listen                         answers such a doctor on another machine in P's place, without vLLM

    findings   what a check says, and how many of them make a report
    software   versions, and whether they fit each other
    machine    the transfer engine, devices, memory and clock of this machine
    standin    what ``--listen`` is: leases over noise, by the prefill side's own classes
    decode     the caches that a decode engine would have for what a P describes
    http       the two questions to a server's HTTP port
    target     where a visit pulls to
    visit      the checks of a P, by the decode side's own classes

Nothing here is a second implementation: transfers, plans, leases and messages are those of the connector.
"""
