"""Entry point of `python -m jetrl_megatron.integrations.nemo_rl`."""

import sys

from jetrl_megatron.integrations.nemo_rl.command import main

sys.exit(main())
