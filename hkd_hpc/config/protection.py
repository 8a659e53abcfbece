"""What section `privacy` does with these settings: to features, what of it nothing reads, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator

from hkd_hpc import schemes
from hkd_hpc.config.sections import Config
from hkd_hpc.privacy.mechanism import Mechanism, of_features
from hkd_hpc.privacy.settings import PrivacySettings

OF_KNOWLEDGE = ("mechanism", "clip", "bound", "multiplier", "predictions", "counts", "extractor")
REPLACED = ("noise", "clip", "zeta", "sigma")  # of the scheme's own settings, by privacy.mechanism
SOURCES = {
    "simulation": "simulation, no privacy: noise is a stream of the seed",
    "release": "release: noise is of the operating system's entropy",
}


def protects(config: Config) -> tuple[str, ...]:
    """Which of features, predictions and counts the scheme reports by the rules of section `privacy`."""
    return getattr(schemes.get(config.scheme.name), "protects", ())


def mechanism_of(config: Config) -> Mechanism:
    """What is done to the mean features that clients report; of a scheme that reports none: nothing."""
    own = getattr(config.scheme, "own_mechanism", Mechanism())
    return of_features(config.privacy, own) if "features" in protects(config) else Mechanism()


def shares_weights(config: Config) -> bool:
    """Whether clients go on from the mean of the weights, as far as settings tell."""
    is_shared = getattr(schemes.get(config.scheme.name), "shares_weights", True)
    return bool(is_shared) and getattr(config.scheme, "weights", "average") != "none"


def noise_is_drawn(config: Config) -> bool:
    """Whether anything that leaves a client has noise, or will have: privacy.epsilon finds its multiplier later."""
    privacy, features, kinds = config.privacy, mechanism_of(config), protects(config)
    if privacy.epsilon:
        return True
    on_features = features.noise == "code" or (features.noise != "off" and features.multiplier > 0)
    on_predictions = privacy.predictions and privacy.multiplier > 0 and "predictions" in kinds
    on_counts = privacy.counts > 0 and "counts" in kinds
    return on_features or on_predictions or on_counts or (privacy.update_multiplier > 0 and shares_weights(config))


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """(key, the setting because of which it is not read), of section `privacy` and of what it replaces."""
    kinds, scheme = protects(config), f"scheme.name={config.scheme.name}"
    if not kinds:
        yield from ((f"privacy.{name}", f"{scheme}, which shares no class means") for name in OF_KNOWLEDGE)
    elif "predictions" not in kinds:
        yield "privacy.predictions", f"{scheme}, which reports none"
    if kinds:
        yield from _without_effect_by_mechanism(config)
    if not noise_is_drawn(config):
        yield "privacy.mode", "no noise at all"


def _without_effect_by_mechanism(config: Config) -> Iterator[tuple[str, str]]:
    privacy, features = config.privacy, mechanism_of(config)
    why = f"privacy.mechanism={privacy.mechanism}"
    if privacy.mechanism == "scheme":
        yield "privacy.clip", why
        yield "privacy.bound", why
    else:
        yield from ((f"scheme.{name}", why) for name in REPLACED)
        if features.noise == features.clip == "off":
            yield "privacy.bound", why
    if privacy.mechanism in ("scheme", "off") and not privacy.predictions:
        yield "privacy.multiplier", why


def told(config: Config) -> str:
    """What a run whose settings speak of privacy says of it at its beginning; empty for all others."""
    if config.privacy == PrivacySettings():
        return ""
    kinds = "; ".join(_kinds(config)) or "nothing that a client reports is changed"
    return f"privacy: {kinds}" + f"; {SOURCES[config.privacy.mode]}" * noise_is_drawn(config)


def _kinds(config: Config) -> Iterator[str]:
    """features: l2 clip 3, noise multiplier 7 (vector)"""
    privacy, features, kinds = config.privacy, mechanism_of(config), protects(config)
    if "features" in kinds:
        clip = "no clip, so no bound" if features.clip == "off" else f"{features.clip} clip {features.bound:g}"
        noise = {"off": "no noise", "code": "one draw of noise for all classes (code)"}.get(
            features.noise, f"noise multiplier {features.multiplier:g} ({features.noise})"
        )
        yield f"features of the {privacy.extractor} model: {clip}, {noise}"
    if privacy.predictions and "predictions" in kinds:
        yield f"predictions: noise multiplier {privacy.multiplier:g}"
    if privacy.counts and "counts" in kinds:
        yield f"counts: noise multiplier {privacy.counts:g}"
    if privacy.update_clip and shares_weights(config):
        noise = f"noise multiplier {privacy.update_multiplier:g}" if privacy.update_multiplier else "no noise"
        yield f"changes of the weights: l2 clip {privacy.update_clip:g}, {noise}"
    if privacy.secure_sum:
        yield "weights: summed under masks"
