"""A script that ends itself, as many do."""

import sys

sys.exit(0)
