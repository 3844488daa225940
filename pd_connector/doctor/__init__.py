"""What to run on a host before it serves: ``pd-doctor``, or ``python -m pd_connector.doctor``.

    pd-doctor                                  this machine: software, devices, memory, NPUs, two processes
    pd-doctor --peer HOST[:PORT]               and a running P, at its HTTP port: handshake, and real pulls
    pd-doctor --pool HOST:PORT                 and a pool, by this machine's mooncake_client: objects there and back
    pd-doctor --listen                         answers such a doctor on another machine in P's place

    findings    what a check says, and the report of many
    software    versions, and whether they fit each other
    machine     address, port, devices and memory of this machine
    npu         CANN, and copies of this machine's first NPU
    listener    what ``--listen`` is: leases over noise, by the prefill side's own classes
    http        the two questions to a server's HTTP port
    peer_check  the checks of a P, which is pulled from by the decode side's own workers
    pool_check  the checks of a pool, by the client and the thread that engines use

Nothing here is a second implementation: transfers, plans, leases and messages are those of the connector.
"""
