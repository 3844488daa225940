"""What tests share: builders, fakes, simulations and drivers. Fixtures are in the conftest modules beside the tests.

For all tests:
    waiting                 ``until`` something has come, ``holds_for`` a while, and a clock that is moved by hand
    memory                  memory filled with noise, and descriptors between two places of it
    sources                 the source files of this project, and what each of them imports
    kernels                 keeps on disk what numba compiles, for all processes of the tests
    imports                 what the import of a module needs, and what of it the wheel does not declare
    gpu_machine             what a machine lacks for what needs a CUDA GPU, and whether the CPU takes its place
    certificates            a CA of one's own, and a server's certificate that it has signed
    process                 what this process holds (threads, files, sockets), and free ports
    pure_vllm               unpacks the Python files of a vLLM that cannot be installed here
    releases                tests of what only some releases of vLLM have, and the environments of other releases

The names of vLLM that the connector uses (``tests/versions``):
    vllm_names.table        what is known of a name in one release, and a table of that in a file
    vllm_names.sources      what the sources in a wheel of vLLM say of a name
    vllm_names.uses         what our code uses of vLLM, and what of that a release does not have
    vllm_names.__main__     makes the table, from wheels

Layouts of KV caches (``layout/``):
    layout.oracle           a second opinion on where KV bytes are, one logical index at a time
    layout.ranks            a rank of the oracle as what reads blocks finds it
    layout.pulls            pulls between two engines of the oracle, every byte checked
    layout.nhd              NHD caches as vllm-ascend allocates them, in tensors, and what each byte of them must be
    layout.shared_tokens    engines whose ranks share the tokens of a request, as memory
    layout.layout_pairs     every pair of layouts as parameters of tests, most of them slow
    layout.round_trips      blocks through host memory and back, every byte checked
    layout.strategies       hypothesis strategies that draw models, engines and requests

Transfer engines (``transfer/engine``):
    engine.in_process       a transfer engine in one process, which moves real bytes and fails where it is told to
    engine.pairs            engines of every kind, and a reader and a peer of one kind
    engine.ipc_engines      engines for peers on one host, on fake CUDA drivers that share their memory
    engine.sharing_processes  processes that share device memory, on a GPU or a fake driver, until they are killed
    engine.peer_process     a Mooncake peer in a process of its own, to be stopped, killed and continued
    engine.strange_peers    peers of Mooncake that are not what they seem: silent, or on the port of another

The control channel (``transfer/control``):
    control.samples         one message of each kind, and a handler that remembers what it was asked
    control.faulty_network  a forwarder that loses, repeats, delays and reorders messages
    control.recorder        a forwarder that keeps what clients send
    control.zmtp            ZeroMQ's wire protocol by hand
    control.junk            messages and connections of a stranger's choice

The pool (``transfer/store``):
    store.in_memory         a store in this process, which fails, hangs and forgets
    store.object_slots      a rank of the oracle with host slots, and the objects of the blocks in them
    store.mooncake_processes  a real Mooncake Store: a master, and the client process of this machine

Devices (``transfer/copies/batch``, ``tests/npu_sim``):
    devices.fake_cuda       a CUDA driver in Python
    devices.shared_devices  device memory that several of these drivers share by handles, also those of other processes
    devices.cuda_worker     a rank's caches, its model's stream and its copies to host memory, on that driver
    devices.ascend_runner   a model runner that allocates KV caches as vllm-ascend's does
    devices.npu_simulator   builds and loads the simulated ACL runtime, whose sources are in devices/npu_runtime
    devices.npu_device      the simulated device by the C interface: memory, streams, events
    devices.kernel_devices  the kernel that reshapes, interpreted on the CPU and compiled on a GPU
    devices.run_batches     runs of bytes between memories, for what copies them on a device
    devices.npu_caches      a worker's KV caches on the simulated device, and host memory for their blocks

Real vllm-ascend on simulated NPUs (``tests/ascend_sim``):
    ascend.environment      makes the environment that it takes, by one command
    ascend.cuda_stubs       stand-ins for the libraries of CUDA that PyTorch's build is linked with
    ascend.kernel_build     compiles the simulated runtime and the host kernels, where they are out of date
    ascend.paths            where things are in that environment
    ascend.preempted_requests  requests that take blocks from each other under vllm-ascend's recompute scheduler
    ascend.scarce_blocks    requests that hold all blocks of an engine, and each lack one
    ascend.servers          the sets of servers that tests share
    ascend.drafting_servers  such sets of servers that draft tokens
    ascend.transport_servers  such sets over Mooncake's own transport for Ascend
    ascend.engine_process   an engine without an API server, started in a process of its own
    ascend.device_generation  another generation of devices; an API server as on those that know fp8
    ascend.device_process   code in a process of its own with simulated devices
    ascend.faults           kernels that take long, and waits that are left out, in a running server
    ascend.reference        what Transformers answers on the CPU
    ascend.mooncake_peer    Mooncake's wheel for NPUs between two processes, on a stand-in for CANN's ADXL
    ascend.faulty_operators  an engine whose attention operators treat caches of all layers together wrongly
    ascend.recipes          vllm-ascend's prefill/decode recipes, and the options that vLLM takes of them
    ascend.recipe_models    tiny configurations of what they serve
    ascend.recipe_weights   what their checkpoints say of how weights are quantised
    ascend.recipe_releases  what vllm-ascend's releases have otherwise, of what engines are made with
    ascend.recipe_groups    a process that stands for any rank of their engines
    ascend.recipe_runner    a worker's layers and model runner, as far as KV caches need them
    ascend.recipe_ranks     the KV caches of each rank, by vllm-ascend's own code
    ascend.recipe_forms     the forms of these caches, by letters, and the shapes of their tensors
    ascend.recipe_memory    a rank's device memory as bytes
    ascend.recipe_oracle    a second opinion on what a prompt's bytes are, and where each rank keeps them
    ascend.recipe_schedulers  their schedulers, and what their workers would have done
    ascend.recipe_pulls     two turns of a conversation, from every rank of P into every rank of D, every byte checked
    ascend.recipe_books     block tables of a lease and of what receives it, by vLLM's own cache managers
    ascend.recipe_workers   the connector's workers on every rank's caches: pulls, proofs, host memory
    ascend.recipe_page      the table of docs/npu_recipes.md
    ascend.recipe_tasks     what tests ask of a recipe's engines
    ascend.recipe_process   processes in which that is done, one for each generation of devices
    ascend.transposes       a program that pulls between NHD caches, on the simulated device itself
    ascend.host_kernels.plugin          lets every process of vLLM load the rest; native/ has the C++ part
    ascend.host_kernels.dispatch        lets operators of the device run on the host
    ascend.host_kernels.norms           operators: norms, activations, sampling
    ascend.host_kernels.rotary          operators: rotary embeddings
    ascend.host_kernels.paged_cache     operators: writing to and reading from paged KV caches
    ascend.host_kernels.attention       operators: attention
    ascend.host_kernels.sparse_attention  operators: sparse attention and its indexer
    ascend.host_kernels.quantised_attention  operators: the same over quantised caches
    ascend.host_kernels.block_sparse_attention  operators: attention to blocks, and their indexer
    ascend.host_kernels.block_sparse_triton  Triton kernels around them: what is cached, and which blocks are chosen
    ascend.host_kernels.compressed_attention  operators: DeepSeek-V4's and V4.1's compressors, indexers and attention
    ascend.host_kernels.ring_compressor  Triton kernels of V4.1's compressor and indexer
    ascend.host_kernels.ngram_tables    Triton kernels of its tables, which are read by the last tokens
    ascend.host_kernels.experts         operators: mixtures of experts
    ascend.host_kernels.gated_delta     operators: gated delta net
    ascend.host_kernels.context_parallel  Triton kernels that join what ranks have seen of a request's tokens
    ascend.host_kernels.kda             operators: Kimi delta attention
    ascend.host_kernels.pooled_indexer  Triton kernels of an indexer whose keys stand for several tokens
    ascend.host_kernels.hyper_connections  operators: residual streams that are mixed
    ascend.host_kernels.triton_kernels  vllm-ascend's Triton kernels
    ascend.host_kernels.collectives     Gloo in HCCL's place
    ascend.host_kernels.absent_modules  modules that only vllm-ascend's container images have

The connector (``pd_connector/``):
    connector.idle          what a connector beside ours in MultiConnector begins with: it moves nothing
    connector.greeting      a connector to put beside ours in MultiConnector: it has a handshake and statistics
    connector.loading_sibling  a connector to put there that loads prompts while a step computes
    connector.requests      requests as vLLM hands them over, params of a prefill, a control client that sends nothing
    connector.engines       prefill and decode engines without vLLM: real control channel, real bytes, real leases
    connector.chunked_prompts  a prompt that a prefill engine computes chunk by chunk, and a client that follows it
    connector.followed_answers  what a prefill engine answers of a named prompt, and decode legs that name it
    connector.cuts          a network between a prefill engine and a decode worker that is cut
    connector.doctors       doctors on hosts of their own, which visit each other
    connector.consumers     the parts of a decode engine's scheduler half, with the test's own client and clock
    connector.kept_blocks   the cache groups that vLLM makes of layers, and the blocks that it keeps in each
    connector.prompts_with_states  vLLM's books of blocks for prompts of a model with states
    connector.state_caches  states of recurrent layers, byte by byte
    connector.state_pulls   pulls of them
    connector.proving       a decode engine's scheduler half that proves where it pulls from
    connector.decode_scheduler  a decode engine's scheduler half, and a scripted prefill engine that it asks
    connector.followed_legs  both legs of a prompt at once: who computes it, and a worker that follows it
    connector.shared_memory  prefill and decode engines on one host, whose workers share device memory
    connector.book_client   a control client that asks a book of checksums without a network
    connector.scripted_pulls  a session with a prefill engine whose pulls and handshakes do what the test says
    connector.slot_mapping  vLLM's own slot mapping, without a device
    connector.staging       a staging buffer for a decode worker, and a prefill engine of which pulls are staged
    connector.landing       a decode worker's host memory, into which it really pulls
    connector.moving        prefill engines whose leases lie in host memory, byte by byte
    connector.nhd_pulls     pulls between NHD caches through the real reader and copier, their operators counted
    connector.staged_ranks  ranks of the oracles that read through staging and by the kernel, on its devices
    connector.first_pull    the first staged pull of a new process: what was not ready for it
    connector.vllm_calls    the calls that vLLM makes in a step, in the form of the installed release
    connector.vllm_engine   both sides of one engine's ``PDConnector``, called as vLLM calls them
    connector.stated        what vLLM states of caches, as the connector takes it
    connector.tensors       what is true of cache tensors, as vLLM would state it
    connector.cpu_layers    attention layers with vLLM's real CPU kernels

Simulations of many engines (``test_state_machine``, ``test_progress``) and of one with a host tier
(``test_host_machine``):
    simulation.network      messages that are delivered, lost, repeated and reordered one by one
    simulation.prefill      a prefill engine: a block pool with stamps for contents, and its promises kept apart
    simulation.prefill_steps  the steps of that engine, which compute named prompts chunk by chunk
    simulation.decode       a decode engine: vLLM's scheduler and workers as far as the connector meets them
    simulation.named_prefill  a prefill engine whose prompts are followed by name: vLLM's schedulers, our scheduler side
    simulation.prefill_works  what the steps of that engine are to compute, token by token
    simulation.scheduler_pulls  a pull as a worker makes it, in steps
    simulation.state_groups  states of recurrent layers in the engines of ``vllm_schedulers``, each block checked
    simulation.pooled       a pool that engines of ``vllm_schedulers`` share, and their workers' part in it
    simulation.prefix_engines  engines of ``vllm_schedulers`` that find prefixes at each other and in a pool
    simulation.engine_config  vLLM's configuration of such an engine
    simulation.engine_worker  a worker's device and host memory, token by token, and what is under way to them
    simulation.images       images in such engines' prompts, and an encoder that looks at them
    simulation.vllm_schedulers  engines around vLLM's own schedulers and our scheduler side, with such workers
    host_tier.engine        an engine around ``HostTier``: vLLM's cache manager, its scheduler in short, its ranks
    host_tier.sibling       a connector beside ours that loads while a step of that engine computes, or fails to
    host_tier.ranks         what the device blocks and host slots of a rank hold, and the copies between them
    host_tier.state_steps  states at borders of blocks in such an engine
    host_tier.setup         what such an engine is made of: cache manager, pool of host blocks, requests, steps
    host_tier.decoding      the roles of a decode engine to whose host memory prompts are pulled, slot by slot
    host_tier.leasing       the roles of a prefill engine whose leases may move, with every byte that is copied
    host_tier.cases         short cuts for tests of one case at a time

Real servers (``tests/e2e``):
    e2e.apart_deployments   sets of servers on hosts of their own, or on several, and of data-parallel ones
    e2e.api_clients         chats, responses, messages and tokens, asked by the clients that their users have
    e2e.architectures       architectures of the test models: configurations and random weights
    e2e.draft_layers        layers that draft tokens, for such models
    e2e.glm5_next           the architecture of GLM-5.3-Flash: states beside keys of pools and latent vectors
    e2e.compressed_model    DeepSeek-V4's and V4.1's, of layers that differ
    e2e.models              a tiny model, whose output depends on every block of its prompt, as a directory
    e2e.hybrid_deployments  sets of their servers
    e2e.hybrids             models of which some layers keep states
    e2e.hosts               network namespaces as hosts of their own at a switch
    e2e.images              images for prompts, as clients send them
    e2e.cluster             vLLM servers on this machine: started together, watched, ended, measured
    e2e.deployments         the sets of servers that tests share
    e2e.cuda_deployments    pairs of servers on one CUDA GPU, or on the CPU in its place
    e2e.exact               answers that must be equal in every bit
    e2e.pipeline_deployments  such sets with servers whose layers are spread over pipeline stages
    e2e.fleet_trouble       servers of a fleet and processes of their pool that stop, and die and come back
    e2e.pooled_servers      servers that put into a pool and find there, one after the other's end
    e2e.prefix_deployments  such a set with servers that pull prefixes from each other, and die
    e2e.staged_worker       vLLM's CPU worker for a pipeline stage
    e2e.ray_on_cpu          vLLM's API server, whose workers are Ray's actors, on CPU
    e2e.bordered_worker     vLLM's CPU worker for Mamba2 layers that find prefixes
    e2e.release_servers     such sets with servers of other vLLM releases
    e2e.choice              which pairs of servers a test runs on, and which of them by default
    e2e.images_and_adapters  servers of a model that reads images and has LoRA adapters, and prompts for them
    e2e.forked_server       vLLM's API server, whose other processes are forked from it, on CPU
    e2e.fork_server         a process that has imported vLLM, from which such servers are forked
    e2e.headless_node       a further node of a server whose ranks are on several hosts
    e2e.gates               places in the workers of a server at which a test has them stop
    e2e.gated_connector     the connector with such places
    e2e.conversations       conversations that go on at another server
    e2e.host_memory         what tests of servers with host memory have in common
    e2e.legs                both legs of a request at once, as a router sends them
    e2e.router_bodies       what routers send that cannot be run here
    e2e.routers             routers as they come: their processes, and the APIs through which clients ask them
    e2e.fixtures            servers that are started once a deployment, as fixtures
    e2e.client              what a test asks of one server: completions and counters
    e2e.pair                a prefill and a decode server seen as one, and the books that must balance
    e2e.points              requests that are held at a chosen point, and what happens to a server then
    e2e.corruption          other contents in a block that a server holds, behind its back
    e2e.forwarder           a TCP forwarder to a control port, which loses what a test wants
    e2e.trouble             servers of a pair that stop, and die and come back

Deployments (``deploy/``):
    deploy.monitoring       the connector's metrics, the dashboard's queries, and promtool
    deploy.prometheus       a real Prometheus with the alert rules
    deploy.dockerfiles      the instructions of the images' Dockerfiles, and the files that a build is sent
    deploy.image_roots      does them in a new Debian root, and runs commands there as in a container

Examples (``examples/``):
    browser                 chromium without a window
    numa                    a NUMA node of this machine, and what the kernel says that memory prefers
    otlp                    a collector of OpenTelemetry traces
    examples.harness        owners of fake servers, clients that leave, processes of a proxy
    examples.fake_servers   small HTTP servers in the place of vLLM, which misbehave on request
    examples.balancer       several of them behind one URL, each connection with the next
    examples.minimal        the router in one file as a process, between two of them
    examples.served_proxy   the full proxy in front of such servers, in this process
    examples.moving         decode servers that go on with each other's answers, and a proxy that has them do so
    examples.greedy         greedy streams, which begin with the prefill server's own token, as P and D write them
    examples.run_scripts    runs ``run_pd_*.sh``, and knows every process that they have started
    examples.manifests      the manifests for Kubernetes, and the questions that tests ask of them
"""
