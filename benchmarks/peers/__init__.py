"""This connector beside vLLM's own Mooncake and NIXL connectors: ``make bench-peers``.

    requirements.txt    what the environment has beside this project's own packages
    model               random models whose answers depend on every block of the prompt, one of them a hybrid
    connectors          what differs between the connectors: options, environment, the parameters of both legs
    mooncake_on_cpu     vLLM's Mooncake connector, with the one change that it needs to start on CPU
    counters            descriptors and bytes, as each connector counts them
    servers             a prefill and a decode server for each connector, and how they are ended
    sending             one request in two legs, and when what came back
    rounds              what is measured: which servers, which prompts, in which order
    budget              how much of a run's time is left for repeats
    trouble             what happens: unequal block sizes, unequal types, hybrids, a prefill server that is killed
    summary             medians, percentiles, counts of errors and wrong answers
    table, plots        Markdown and SVG out of the results' file; they measure nothing
    __main__            runs all of it and writes benchmarks/results/peers.json, of hybrids peers_hybrid.json

All connectors serve the same model with the same arguments on the same machine, all servers of a round are alive
together, and every prompt goes to every connector, each of them first in its turn: whatever else the machine does hits
all alike.
"""
