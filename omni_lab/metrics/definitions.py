"""The one definition of each figure, written into every result file."""

from __future__ import annotations

SAMPLE_RATE = 24_000
"""Hz of all audio, mono."""

FRAME_SAMPLES = 1920
"""Samples of one codec frame, of which there are 12.5 a second."""

DISTRIBUTIONS = (
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2el_ms",
    "audio_ttfp_ms",
    "audio_rtf",
    "audio_duration_s",
    "audio_underrun_s",
)
"""Figures of single requests; a cell has the mean, the median and the 99th percentile of each."""

COMPARED = (
    "request_throughput",
    "steady_request_throughput",
    "output_throughput",
    "audio_throughput",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "mean_audio_ttfp_ms",
    "p99_audio_ttfp_ms",
    "mean_audio_rtf",
    "mean_audio_underrun_s",
)
"""Figures of a cell that are divided by those of the first configuration."""

COMPARED_STAGES = ("step_ms", "gap_us_median", "tokens_per_s")
"""The same for each stage."""

DEFINITIONS = {
    "send time": "When the client hands the request over; every latency counts from here, at the client.",
    "completed": "Requests that ended without an error. All latencies are of these.",
    "failed": "Requests that ended with an error or were aborted.",
    "duration": "s from the first request's send time to the last request's end.",
    "request_throughput": "Completed requests / duration.",
    "output_throughput": "Text tokens of completed requests, the stop tokens included, / duration.",
    "audio_throughput": "Seconds of audio of completed requests / duration.",
    "ttft_ms": "Time to first token: the first text event with a new token.",
    "itl_ms": "Inter-token latency: time since the text event before, divided by the new tokens of this one, once for "
    "each of them; further tokens of the first event count as 0. Pooled over requests.",
    "tpot_ms": "Time per output token: mean inter-token latency of a request of at least two tokens.",
    "e2el_ms": "End-to-end latency: the end of the answer.",
    "audio_ttfp_ms": "Time to first packet: the first chunk with audio samples in it.",
    "audio_duration_s": "Seconds of audio in the answer.",
    "audio_rtf": "Real-time factor: time of the last audio chunk / audio_duration_s. Below 1 is faster than speech.",
    "audio_underrun_s": "A player starts at the first chunk and never waits: its largest shortage of audio at the "
    "arrival of a later chunk.",
    "audio_continuity_ok_rate": "Share of the answers with audio whose underrun is at most 0.1 s.",
    "mean_dispatch_delay_ms": "From when a request should be sent (its arrival time; in closed loop, the moment its "
    "slot became free) to when it was sent.",
    "mean_requests_in_flight": "Number of requests sent and not yet ended, averaged over the duration. Little's law "
    "says that it is request_throughput x mean_e2el_ms / 1000 when no request fails.",
    "littles_law_ratio": "request_throughput x mean_e2el_ms / 1000 / mean_requests_in_flight.",
    "steady_request_throughput": "Requests that ended after the last one of the first wave and until the last request "
    "was sent, / the time between. null in open loop, or when there is no such time.",
    "first_wave": "Means of the first `concurrency` requests, all sent at once to an empty pipeline.",
    "hit_max_frames": "Completed requests whose speech was cut at the talker's max_tokens. null with a fixed length.",
    "client_busy_share": "Processor time of the client's process / duration. With the inline executor the stages run "
    "in this process and are in it.",
    "others_cpu_share": "Share of the machine's processors that other programs used meanwhile.",
    "mean_, median_, p99_": "Over the completed requests in which the figure was measured; percentiles interpolate.",
    "over repeats": "A cell's figure is the mean of its repeats, `_std` their standard deviation (null for one).",
    "traces": "What was captured in a repeat: for each worker path, steps, bytes, what ended its window (steps, max_s, "
    "max_mb or stopped), alignment_us (its times lie within so much on the machine's clock), or the error. Such a "
    "repeat counts in the cell's figures, and in `relative`, only if there is no other.",
    "relative": "Each figure divided by the first configuration's at the same concurrency: the geometric mean of the "
    "ratios of the single repeats, which are run in turn; `low` and `high` are the 95 % interval of Student's t on "
    "their logarithms. The verdict is higher or lower if the whole interval is, `within noise` if 1 lies in it, and "
    "`too few repeats` if there are less than two. Each interval stands for itself: of twenty comparisons of equal "
    "things about one falls outside. null where nothing can be compared.",
    "stages.steps": "Engine steps of all replicas of the stage.",
    "stages.mean_batch": "Sequences in a step, mean.",
    "stages.step_ms": "Duration of a step, mean: from preparing its inputs until its result is on the host.",
    "stages.step_*_us": "The parts of a step, mean: prepare, forward (embedding of prompts aside), sample.",
    "stages.gap_us": "Step gap: between two steps of a replica, the time in which its loop worked for the next one: "
    "schedule + payload + send + other. Waiting is no gap of the loop.",
    "stages.gap_*_us": "What lies between two steps, mean: input (requests are there, none has the input for its next "
    "step), slot (no room in the output path, or, inline, other stages have the thread), schedule (messages taken in, "
    "batch chosen), payload (outputs built), send, other. They add up to the time between two steps, less that in "
    "which the replica had no request at all.",
    "stages.beside_us": "Time a step in which payloads were built and sent in the builder's thread, beside the loop.",
    "stages.busy_ratio": "Time in steps and in gaps of the loop / (duration x replicas).",
    "stages.graph_replays": "Replays of captured graphs: one a step, of code2wav one for each pass of a step; missing "
    "where nothing was captured.",
    "stages.eager_steps": "The same for steps and passes that ran operator by operator, prefill aside.",
    "stages.captured_prefills": "Prefills that were replays of a captured graph; missing where there is none.",
    "stages.eager_prefills": "Prefills that ran operator by operator though there is a graph: with images or "
    "videos, or very long.",
    "stages.tokens_per_s": "Text tokens (thinker) or codec frames (talker, code2wav) / time in steps "
    "and in gaps of the loop.",
}
"""What each name in run.json means. A figure that was not measured is null."""
