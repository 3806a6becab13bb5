"The tests of this folder need a browser: only `make test-browser` and `make screenshot` ask for them."
import os

collect_ignore_glob = [] if os.environ.get("TST_BROWSER") else ["*"]
