"""Send one notification with Apprise: the process that ``channels`` starts and, if it hangs, kills.

Reads ``{"url": ..., "title": ..., "body": ...}`` from stdin; the exit code is the answer.
"""

from __future__ import annotations

import json
import sys

IS_MISSING, KNOWS_NO_SUCH_URL, NOT_DELIVERED = 3, 4, 5


def main() -> int:
    """Send it; returns 0 if the service took it, else one of the codes above."""
    request = json.load(sys.stdin)
    try:
        import apprise
    except ImportError:
        return IS_MISSING
    service = apprise.Apprise()
    if not service.add(request["url"]):
        return KNOWS_NO_SUCH_URL
    is_taken = service.notify(title=request["title"], body=request["body"], body_format=apprise.NotifyFormat.TEXT)
    return 0 if is_taken else NOT_DELIVERED


if __name__ == "__main__":
    sys.exit(main())
