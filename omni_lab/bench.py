"""`python -m omni_lab.bench --base-url URL EXPERIMENT.yaml`: an experiment's workload on a server that is running.

`--echo` measures the client alone, against a server of its own that sends prepared answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from omni_lab import run
from omni_lab.core import PipelineError
from omni_lab.experiment import Experiment
from omni_lab.peers.vllm_omni import default_speaker
from omni_lab.workload.http_client import connect
from omni_lab.workload.open_target import Progress
from omni_lab.workload.target import Target

KEY = "OMNI_LAB_API_KEY"
"""Environment variable with the key, where --api-key is not given."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] == "--echo":
        from omni_lab.workload.echo import measure

        return measure(arguments[1:])
    parser = run.parser("omni_lab.bench", __doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="of the server, such as http://127.0.0.1:8091")
    parser.add_argument("--api-key", default=os.environ.get(KEY), metavar="KEY", help=f"default: ${KEY}")
    parser.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    parser.add_argument(
        "--shape", choices=["omni", "openai"], default="omni", help="whose requests to send, vLLM-Omni's or OpenAI's"
    )
    options = parser.parse_args(arguments)

    def attach(experiment: Experiment, progress: Progress, folder: Path) -> AbstractAsyncContextManager[Target]:
        if experiment.profile.enabled:
            raise PipelineError("profile.enabled: expected false, a server that is running is not captured from here")
        speaker = default_speaker(experiment) if experiment.target == "vllm-omni" else None
        return connect(options.base_url, options.api_key, options.model, options.shape, speaker)

    return run.execute(options, attach)


if __name__ == "__main__":
    sys.exit(main())
