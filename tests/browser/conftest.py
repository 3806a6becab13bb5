"The tests of this folder need a browser: only `make test-browser` and `make screenshot` ask for them."
import os

collect_ignore_glob = [] if os.environ.get("TST_BROWSER") else ["*"]
if os.environ.get("TST_BROWSER"): from desk import browser, downloads, page, server   # noqa: F401
