"""Examples of MpAgentGradientExplosion."""

from tests.alerting.examples.example import Examples
from tests.alerting.examples.gradient_explosion_examples import FIRING, QUIET

EXAMPLES = {
    "MpAgentGradientExplosion": Examples(
        firing=FIRING,
        quiet=QUIET,
    ),
}
