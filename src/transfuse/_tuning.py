"""Every second and every byte that somebody chose, in one table.

What users may set is in ``_limits``; the sizes of parcels, rounds and bursts follow from rules in ``_sizes``, and how a
timeout is split among waits from ``_timeouts``. Lengths that a format fixes (headers, digests, nonces) are with the
format. This module imports nothing.
"""

from __future__ import annotations

# --------------------------------------------------------------------------------------------------------- The command

# cli/options
#: A week. The system's clocks do not take much longer times.
CLI_LONGEST_SECONDS = 604_800

# cli/doctor
#: The longest wait for a name lookup. If it takes longer, gloo fails as well.
DOCTOR_LOOKUP_SECONDS = 3.0
#: How long two agents of NIXL may take to meet, and one read of 512 KiB.
DOCTOR_NIXL_SECONDS = 20.0
DOCTOR_NIXL_READ_SECONDS = 5.0
#: How often it is asked whether the read is done.
DOCTOR_NIXL_LOOK_SECONDS = 0.001
#: What a trial of the routes moves, the timeout of its transfers, the longest time in which it measures one route, and
#: the time after which it is given up.
DOCTOR_STATE_BYTES = 32 << 20
DOCTOR_TRANSFER_SECONDS = 5.0
DOCTOR_MEASURED_SECONDS = 0.7
DOCTOR_TRIAL_SECONDS = 12.0


# ------------------------------------------------------------------------------------------------------------- The Hub

# _hub/assets
#: Assets are read into memory to be sent.
HUB_ASSET_MAX_BYTES = 256 << 20

# _hub/commits
#: A client gives up a request after 10 s. A request waits at most this long for a copy.
HUB_COMMIT_WAIT_SECONDS = 8.0
#: How long a commit stays in use after a request of a visitor that did not get it as ``main``, or has closed.
HUB_COMMIT_SHORT_SECONDS = 1.0
#: Memory is freed when nobody has asked for anything for this long.
HUB_COMMIT_FREE_SECONDS = 600.0

#: A wait for a moment ends this long after it, so that the moment has passed.
HUB_COMMIT_PAST_SECONDS = 0.001

# _hub/hub
#: What ``save_pretrained`` takes for a file. Clients download several files at once.
HUB_MAX_SHARD_BYTES = 5_000_000_000

# _hub/sources
#: Servers of a training job may be at different steps: a fetch is tried ``TRIES`` times, ``BETWEEN_SECONDS`` apart.
HUB_SOURCE_BETWEEN_SECONDS = 0.05
#: The step that servers have told is believed for this long: a client asks for ``main`` several times in a row.
HUB_SOURCE_BELIEVED_SECONDS = 0.25


# --------------------------------------------------------------------------------------------------------- Generations

# _job/generations
#: How often a rank looks for the others.
REGROUP_LOOK_SECONDS = 0.02
#: How often a supervisor looks for workers that are stuck, if none ends.
SUPERVISE_LOOK_SECONDS = 1.0


# ---------------------------------------------------------------------------------------------------------- The keeper

# _keeper/bundles
#: Storages smaller than this are put together, into bundles of about this size.
BUNDLE_BYTES = 1 << 20

# _keeper/client
#: How long a worker waits until it tries again to attach to a keeper, if that one ends just now.
KEEPER_AGAIN_SECONDS = 0.05
#: How often a lost keeper is started anew, or looked for, when that has failed.
KEEP_REVIVE_SECONDS = 5.0

# _keeper/attach
#: How often a worker looks for a keeper that somebody else starts.
KEEPER_AWAIT_SECONDS = 0.1
#: How often it looks for one that it has started itself.
KEEPER_START_SECONDS = 0.02
#: A keeper that is there has at least this long for its answer, if nearly all the time is gone.
KEEPER_LEAST_SECONDS = 1.0

# _keeper/commits
#: How long a commit waits for the keeper's answer, before training goes on without it.
COMMIT_ANSWER_SECONDS = 5.0
#: How long a rank that asks for a layout waits for the other ranks of its host, which may share it.
COMMIT_PARTNER_SECONDS = 5.0

# _keeper/draining
#: How long a keeper that was told to end waits for what is under way. Kubernetes kills after 30 s.
DRAIN_SECONDS = 20.0
#: How often it looks whether that has ended.
DRAIN_LOOK_SECONDS = 0.02
#: How long it waits for the leader to agree on its newest step, and for how long a leader may be silent before that.
DRAIN_RING_SECONDS = 1.5

# _keeper/door
#: How long a question to another keeper may take.
DOOR_ASK_SECONDS = 5.0
#: A connection to the door: how long it has to prove the token.
DOOR_PROVE_SECONDS = 10.0
#: How often a connection looks whether it is still needed.
DOOR_LISTEN_SECONDS = 0.5
#: A keeper that cannot be reached is asked again after the first, then twice as much, at most the second.
DOOR_FIRST_PAUSE_SECONDS = 0.2
DOOR_LONGEST_PAUSE_SECONDS = 5.0

# _keeper/overview
#: How long the keeper of another host may take to say how it is.
OVERVIEW_ASK_SECONDS = 2.0
#: The rate of commits that is shown is that of the last seconds.
RATE_SHOWN_SECONDS = 60.0

# _keeper/process
#: How often the keeper looks whether it is still needed.
KEEPER_LOOK_SECONDS = 0.25
#: How long a worker has to attach before a keeper that nobody needs ends.
KEEPER_FIRST_SECONDS = 60.0
#: How often the newest step is noted, for a keeper that comes after this one.
KEEPER_NOTE_SECONDS = 5.0
#: How long a worker that takes an ended worker's place waits until its connection is closed.
KEEPER_CHANGE_SECONDS = 10.0
KEEPER_ANSWER_SECONDS = 30.0
#: How often a worker's thread that waits for another worker looks again, if nothing wakes it.
KEEPER_PEER_SECONDS = 0.1
#: How long a reader on another host may go without progress.
KEEPER_SERVE_SECONDS = 60.0

# _keeper/rendezvous
#: How long a rank sleeps between two looks into the store: this at first, and ever longer up to the second.
RENDEZVOUS_MIN_PAUSE_SECONDS = 0.002
RENDEZVOUS_MAX_PAUSE_SECONDS = 0.2

# _keeper/replicas
#: How often a puller looks for an agreed step, if nothing wakes it.
REPLICA_LOOK_SECONDS = 0.2

# _keeper/ring
#: How often the leader asks the others, if nothing wakes it.
RING_ROUND_SECONDS = 0.2
#: After everybody has closed, the leader ends within this time, even if some followers could not be told.
RING_OVER_SECONDS = 10.0
#: A follower complains if it has not heard the leader for this long.
RING_SILENCE_SECONDS = 30.0
#: How long another keeper's connection may say nothing, if it borrows nothing.
RING_IDLE_SECONDS = 120.0
RING_CLOSE_SECONDS = 3.0

# _keeper/storage
#: What one call writes to a file.
STORAGE_PIECE_BYTES = 8 << 20

# _keeper/save_leader
#: How often the leader asks who has what to save, if nothing wakes it, and how a save under way is going.
SAVE_ROUND_SECONDS = 0.2
SAVE_POLL_SECONDS = 0.05
#: A save is given up when a host's storage has taken nothing for this long. A large file is flushed at its end.
SAVE_SILENCE_SECONDS = 300.0
#: When all ranks have closed, their last step waits this long to become complete on all hosts.
SAVE_LAST_SECONDS = 10.0

# _keeper/saved_steps
#: How long a worker's question for files on storage waits, before it is told to ask again.
STORAGE_LOOK_SECONDS = 1.0

# _keeper/saving
#: How often a writer says that it lives; and when a directory that another one writes to is looked at again.
WRITER_BEAT_SECONDS = 5.0
WRITER_AGAIN_SECONDS = 60.0
#: A new writer waits this long, and then looks whether another one came at the same moment.
WRITER_SETTLE_SECONDS = 0.5
#: How long a host looks for what the leader has written, before it takes its directory for a disk of its own.
WRITER_SIGHT_SECONDS = 2.0
#: An order that is carried out at once is answered at once.
SAVE_AT_ONCE_SECONDS = 0.02

# _keeper/transfers
#: How long a pull may go without progress. More if the rate is so low that a parcel takes longer.
REPLICA_PULL_SECONDS = 30.0

# _keeper/unkept
#: When a warning comes if no step has become complete since the job began to commit.
UNKEPT_FIRST_SECONDS = 5.0
#: When it comes later, and again: after the first number of seconds, or after that many commits if these took longer
#: than the last.
UNKEPT_AGAIN_SECONDS = 30.0
UNKEPT_WHILE_SECONDS = 10.0


# -------------------------------------------------------------------------------------------------------- Integrations

# integrations/rank_state
#: The tensor's size is the smallest power of two of this that holds twice what is written when it is made.
RANK_STATE_LEAST_BYTES = 1 << 14

# integrations/vllm
#: The size of a group, unless ``max_bytes`` says otherwise or one weight is larger.
VLLM_GROUP_BYTES = 1 << 30


# -------------------------------------------------------------------------------------------------------------- Memory

# _memory/arena
#: A storage of this size or more gets its own allocation.
ARENA_LARGE_BYTES = 1 << 20
#: Runs of this size or more are worth the kernel's huge pages.
ARENA_HUGE_BYTES = 2 << 20
#: The largest mapping. One small tensor that outlives all others keeps at most this much memory from being released.
ARENA_MAPPING_BYTES = 16 << 20

# _memory/blocks
#: The bytes of a storage or a file that have a digest of their own: hosts that compare them must have the same size.
HASHED_BLOCK_BYTES = 1 << 20

# _keeper/copying
#: Of what comes from devices by the host's hands, this much is in main memory at once, in two buffers. A small bundle
#: lies in a buffer whole.
PASSING_BYTES = 32 << 20

# _keeper/fingerprints
#: A device makes fingerprints of this much at a time. Meanwhile it needs three times as much of its memory.
FINGERPRINT_PIECE_BYTES = 4 << 20

# _memory/device_copies
#: A run of at least this size is copied by itself. Smaller ones are packed on the device, into pieces of the second
#: size. A device that is full gets smaller pieces.
DEVICE_LARGE_BYTES = 1 << 20
DEVICE_PIECE_BYTES = 16 << 20
#: How long a device that is full to the last item is asked again.
DEVICE_ROOM_SECONDS = 5.0
#: Small runs are packed together if fewer bytes than this lie between them: what alignment leaves, and nothing else.
DEVICE_PADDING_BYTES = 64
#: The size of a pinned buffer through which ordinary memory is copied. There are two.
DEVICE_STAGING_BYTES = 8 << 20

# _memory/device_handles
#: The longest handle that a source gives and a receiver accepts. CUDA's have 66 bytes, and more for segments that grow.
DEVICE_HANDLE_BYTES = 4096

# _memory/mutation
#: How long a device may take to bring samples of its tensors, where no transfer says it.
DEVICE_SAMPLE_SECONDS = 60.0

# _memory/compared
#: How many items at a time are looked at to see whether they have been widened.
WIDENED_ITEMS = 1 << 20

# _memory/packing
#: How many bytes of parcels a thread takes at a time to hash. From a device, two such batches are in main memory.
HASHED_BYTES = 4 << 20

# _memory/streams
#: While a device is asked whether something is done: the first pause between two questions, and the longest one.
DEVICE_MIN_PAUSE_SECONDS, DEVICE_MAX_PAUSE_SECONDS = 20e-6, 1e-3

# _memory/vm
VM_CALL_BYTES = 8 << 20
#: Ranges of about this size are long: the call for each of them does not count.
VM_LONG_BYTES = 64 << 10
#: For fewer bytes a second thread costs more time than it saves.
VM_THREAD_BYTES = 4 << 20


# ------------------------------------------------------------------------------------------------------------- Metrics

# _metrics/endpoint
#: How long a client that asks for metrics may take nothing, and how long closing waits for answers.
METRICS_CLIENT_SECONDS = 10.0
METRICS_END_SECONDS = 1.0
#: How long a question about a keeper's health waits for the keeper's lock.
METRICS_HEALTH_SECONDS = 2.0

# _metrics/names
#: The upper ends of a histogram's buckets.
METRICS_BUCKET_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

# integrations/debug_server
#: How long a keeper may take to say how it is, for a page of torch's debug server.
METRICS_KEEPER_SECONDS = 2.0
#: How long torch's debug server waits for such a page.
METRICS_PAGE_SECONDS = 60.0

# _metrics/shared_file
#: How long a process that has written the file of a host's metrics waits until it writes again.
METRICS_WRITE_SECONDS = 1.0
#: How long the end of a process waits for its turn to write there.
METRICS_EXIT_SECONDS = 2.0
#: How often it tries to get the turn.
METRICS_LOCK_SECONDS = 0.01

# _keeper/process
#: How often a keeper tries again to listen for metrics, if its port is taken.
KEEPER_METRICS_SECONDS = 5.0


# -------------------------------------------------------------------------------------------------- PyTorch's own wire

# dropin/torch
#: This many bytes of temporary copies may be under way. Beyond that, a sender waits for the oldest copy.
DROPIN_WINDOW_BYTES = 256 << 20
#: A longer pickle means a garbled length. Metadata takes some hundred bytes per leaf.
DROPIN_MAX_META_BYTES = 1 << 32
#: Backends count whole milliseconds, and 0 means the group's own timeout.
DROPIN_LEAST_SECONDS = 0.001
#: How long a thread waits for what another thread ends, and how long a call that has failed waits for that thread.
DROPIN_PATIENCE_SECONDS = 86_400.0
DROPIN_END_SECONDS = 1.0


# ------------------------------------------------------------------------------------------------------------ Progress

# _progress
#: When nothing moves, the bar is drawn again after this many seconds, so that its clock goes on.
PROGRESS_STILL_SECONDS = 0.5


# ----------------------------------------------------------------------------------------------------- serve and fetch

# _remote/client
#: The longest key that a reader may ask for: it travels in one frame of the control connection.
FETCH_MAX_ENTRY_BYTES = 4096

# _remote/server
#: How long the end of the interpreter waits for readers to be told.
SERVER_END_SECONDS = 3.0


# ------------------------------------------------------------------------------------------------------------ The wire

# _wire/accepting
#: How long a listener that could not take a connection waits: perhaps the process is out of descriptors, and gets some.
ACCEPT_AGAIN_SECONDS = 0.1

# _wire/device_route
#: How many bytes are copied on a device between two looks whether the caller stops.
DEVICE_READ_BYTES = 256 << 20

# _wire/group
#: How long a backend may take to abort its communicators. It may block, and then nobody waits for it.
ABORT_SECONDS = 5.0
#: With how many peers a rank makes a communicator of the pair's own, which takes device memory. Others use main memory.
COLD_PAIRS = 8

# _wire/handshake
HANDSHAKE_MAX_FRAME_BYTES = 16 << 10
#: How often the server tells a waiting reader that it still has to wait.
HANDSHAKE_WAIT_SECONDS = 0.5

# _wire/http_server
#: A request's line and headers, and its body.
HTTP_MAX_HEAD_BYTES = 32 << 10
HTTP_MAX_BODY_BYTES = 1 << 20
#: How long a request may take to arrive, from its first byte on, and how long a connection may be idle.
HTTP_REQUEST_SECONDS = 10.0
HTTP_IDLE_SECONDS = 120.0
#: What one call hands to the kernel. The kernel copies it: memory that has been handed over may change.
HTTP_SEND_BYTES = 1 << 20
#: A client must take at least this number of bytes in every span of the timeout, or all that is left.
HTTP_LEAST_BYTES = 1 << 20
#: The listening thread looks this often whether there is other work.
HTTP_LISTEN_SECONDS = 1.0
#: How long a new connection waits for the thread of an idle one that was closed for it.
HTTP_ROOM_SECONDS = 1.0
#: How long closing waits for threads that have been cut off.
HTTP_END_SECONDS = 5.0

#: How long a client that is turned away may take for the answer.
HTTP_REFUSE_SECONDS = 1.0

# _wire/interface
#: How long gloo may take to say on which address a device listens.
INTERFACE_PROBE_SECONDS = 1.0

# _wire/listener
#: The listener logs at most one warning about strangers in this time.
LISTENER_COMPLAINT_SECONDS = 1.0

# _wire/meeting
#: Seconds until listening on an address is tried again.
MEETING_AGAIN_SECONDS = 60.0

# _wire/memory_route_read
READ_SPAN_BYTES = 1 << 20

# _wire/nixl_agent
#: How long the progress thread sleeps at most if nothing wakes it. With 0 it would never sleep.
NIXL_PROGRESS_MICROSECONDS = 10_000
#: How long a source keeps memory that a receiver that has failed may still be reading. Over tcp the source's own thread
#: reads the memory for it, and ends the process if the memory is gone.
NIXL_LINGER_SECONDS = 60.0
#: How long the end of the process waits for calls that other threads make.
NIXL_EXIT_SECONDS = 1.0
#: How often it looks whether they have ended.
NIXL_LOOK_SECONDS = 0.01
#: How long the agent's destructor may take at exit. A process hung at its end once; the cause was not found.
NIXL_DESTROY_SECONDS = 30.0

# _wire/nixl_route
#: How long a transfer waits for this process's agent.
NIXL_AGENT_SECONDS = 1.0
#: The longest metadata that a receiver accepts. NIXL needs about 45 bytes for each storage.
NIXL_MAX_METADATA_BYTES = 32 << 20
NIXL_CHUNK_BYTES = 4 << 20
NIXL_LEAST_CHUNK_BYTES = 64 << 10
#: The slowest link that is not taken for a dead one, in bytes per second.
NIXL_SLOWEST_BYTES = 1 << 20
#: Seconds between two questions whether a read is done: the first, and the longest. And how often it is asked whether
#: the caller stops.
NIXL_LEAST_POLL_SECONDS = 20e-6
NIXL_POLL_SECONDS = 1e-3
NIXL_STOP_SECONDS = 0.02
#: How long a read that is no longer needed may take to end, so that its staging need not be given up.
NIXL_GOODBYE_SECONDS = 0.5

# _wire/operations
#: The longest wait, 20 days. Some groups take milliseconds as an int32, and more would not fit.
GROUP_LONGEST_SECONDS = 1_728_000
#: The shortest wait. For less than 1 ms gloo uses its own default.
GROUP_LEAST_SECONDS = 0.002
#: When a receiver that waits for parcels on an accelerator first asks whether its peer is still there.
PROBE_FIRST_SECONDS = 0.05

# _wire/pool
#: Seconds until a connection with a peer is tried again after none could be made.
POOL_AGAIN_SECONDS = 60.0

# _wire/rate_limit
#: After a pause, the bytes of this many seconds may go at once. More would let a burst through at full speed.
RATE_CREDIT_SECONDS = 0.05
#: The longest sleep before ``stopped`` is asked again.
RATE_SLICE_SECONDS = 0.05

# _wire/roll_call
#: The most bytes of one word.
ROLL_CALL_MAX_BYTES = 64 << 20
#: One thread waits for the first words of all ranks. After this time, each rank that is late gets a thread of its own.
ROLL_CALL_TOGETHER_SECONDS = 0.05

# _wire/secure
#: What is encrypted, or decrypted, by one call. Records of TLS have at most 16 KiB; more of them share a call.
SECURE_PIECE_BYTES = 256 << 10
#: What one read from the kernel takes of a connection that is encrypted and carries frames.
SECURE_FRAME_BYTES = 64 << 10
#: The longest cause of a refusal between two ends that have shaken hands.
SECURE_REFUSAL_BYTES = 2000

# _wire/stream
#: The most runs of memory, and the most bytes, that the kernel takes in one call.
STREAM_MOST_BYTES = 1 << 30
#: A call into the kernel returns after this many seconds at the latest, and after a quarter of the timeout.
STREAM_SLICE_SECONDS = 0.1
#: How many questions to an idle peer may go unanswered before its host counts as gone, and the longest time between
#: them that the kernel takes.
STREAM_MOST_SECONDS = 32767

# _wire/switchboard
#: The longest pause of a watch, and how long it stays after the last conversation.
WATCH_PAUSE_SECONDS = 0.1
WATCH_LINGER_SECONDS = 1.0
#: How often a thread that waits for a header looks whether another one has taken over.
WATCH_OWNER_SECONDS = 0.1

# _wire/turns
#: How long the lower rank waits until it asks again.
TURN_AGAIN_SECONDS = 0.01


# ----------------------------------------------------------------------------------------- Threads that are used again

# _workers
#: The name of a worker that has nothing to do, and the seconds after which it ends.
WORKER_LINGER_SECONDS = 1.0
