"""Settings that `mp_agent.init` accepts, only where the defaults do not fit."""

from mp_agent.catalog.thresholds import resolve
from mp_agent.plan.recommendation.choose import settings_for
from mp_agent.settings.load import load_settings
from tests.subtests import each


def test_ordinary_norms_and_scales_need_no_settings():
    assert settings_for((0.5, 2.0), 65536.0) == {} == settings_for((1.0,), None)


@each("norms", [(400.0, 600.0), (3e-4, 1e-3), (1e-9,)])
@each("scale", [None, 2.0**-6, 1.0, 256.0, 4096.0, 32768.0, 2.0**24])
def test_whatever_is_proposed_is_accepted_and_does_not_fire_at_the_start(norms, scale):
    given = settings_for(norms, scale)
    settings, _ = load_settings(**given)
    values = resolve(settings.thresholds)
    assert values["grad_norm_high"] > max(norms)
    assert values["grad_norm_low"] < min(norms)
    if scale is not None:
        assert values["loss_scale_reduced"] < scale
