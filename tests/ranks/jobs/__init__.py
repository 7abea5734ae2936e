"""What the ranks of a test do, by topic. Each function runs in a freshly forked process."""

from ranks.jobs.auditing import *  # noqa: F403
from ranks.jobs.building import *  # noqa: F403
from ranks.jobs.checkpoints import *  # noqa: F403
from ranks.jobs.comparing import *  # noqa: F403
from ranks.jobs.converting import *  # noqa: F403
from ranks.jobs.executing import *  # noqa: F403
from ranks.jobs.experts import *  # noqa: F403
from ranks.jobs.installing import *  # noqa: F403
from ranks.jobs.killing import *  # noqa: F403
from ranks.jobs.layouts import *  # noqa: F403
from ranks.jobs.leaving import *  # noqa: F403
from ranks.jobs.loading import *  # noqa: F403
from ranks.jobs.measuring import *  # noqa: F403
from ranks.jobs.mixed_layers import *  # noqa: F403
from ranks.jobs.optimizers import *  # noqa: F403
from ranks.jobs.storing import *  # noqa: F403
from ranks.jobs.telling import *  # noqa: F403
from ranks.jobs.training import *  # noqa: F403
