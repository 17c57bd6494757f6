"""Watches for the notice that a spot machine of AWS is taken away, and drains this node: training saves then.

    python -m darkroom.cluster.notice --address HEAD:6379

runs next to `ray start` on every machine and ends with it. It needs no program but Python and ray.
"""

from __future__ import annotations

import argparse
import subprocess
import time
import urllib.error
import urllib.request

METADATA = "http://169.254.169.254"
LOOK_EVERY_S = 5.0
ANSWER_S = 2.0
LEFT_S = 110  # of the two minutes that a notice gives


def noticed(metadata: str = METADATA) -> bool:
    """Whether the machine's own metadata tells of a notice; False where there is none, or no metadata."""
    try:
        token = _asked(f"{metadata}/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        _asked(
            f"{metadata}/latest/meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token}
        )
    except (urllib.error.URLError, OSError):  # 404: no notice
        return False
    return True


def _asked(url: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        body: bytes = answer.read()
    return body.decode()


def drain_command(address: str) -> list[str]:
    """What tells Ray that the node goes."""
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice"]
    left = ["--deadline-remaining-seconds", str(LEFT_S)]
    return ["ray", "drain-node", "--address", address, *why, *left]


def main() -> None:
    """Look again and again; drain once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--address", required=True)
    address = parser.parse_args().address
    while not (noticed() and subprocess.run(drain_command(address), check=False).returncode == 0):
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main()
