"""Engines by name. Importing this module imports neither torch nor Ray; making an engine does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from polytier._errors import unknown

if TYPE_CHECKING:
    from polytier.engines.protocol import Engine, EngineFactory
    from polytier.messages.codec import Codec
    from polytier.messages.transforms import Transform
    from polytier.method.context import Context


def make_stacked(context: Context, **settings: Any) -> Engine:
    from polytier.engines.stacked import Stacked

    return Stacked(context, **settings)


def make_ray(context: Context, **settings: Any) -> Engine:
    from polytier.engines.ray.driver import Ray

    return Ray(context, **settings)


def make_loopback(context: Context, **settings: Any) -> Engine:
    from polytier.engines.loopback import Loopback

    return Loopback(context, **settings)


ENGINES: dict[str, EngineFactory] = {"stacked": make_stacked, "ray": make_ray, "loopback": make_loopback}


def find_engine(engine: str | EngineFactory) -> EngineFactory:
    """Return what makes an engine.

    Args:
        engine: A name in `ENGINES`; "ray:auto" or "ray:HOST:PORT" for a running Ray cluster; or a factory, which is
            returned as it is.

    Raises:
        ValueError: If there is no engine of that name.

    Examples:
        >>> find_engine("stack")
        Traceback (most recent call last):
        ValueError: no engine 'stack'; did you mean 'stacked'? available: stacked, ray, loopback, ray:auto, ...
    """
    if not isinstance(engine, str):
        if not callable(engine):
            raise ValueError(f"engine is a name or a class such as polytier.Engine describes; got {engine!r}")
        return engine
    name, _, address = engine.partition(":")
    if name == "ray" and address:
        return partial(make_ray, address=address)
    if engine not in ENGINES:
        raise unknown("engine", engine, [*ENGINES, "ray:auto", "ray:HOST:PORT"])
    return ENGINES[engine]


def make_engine(
    engine: str | EngineFactory,
    context: Context,
    *,
    codec: Codec,
    upload: Transform | None = None,
    tile: int | None = None,
    inner_tile: int | None = None,
    workers: int | None = None,
) -> Engine:
    """Make the engine of a run.

    Args:
        engine: "stacked" (this machine), "ray" (a Ray instance of its own), "ray:auto" or "ray:HOST:PORT" (a running
            Ray cluster), "loopback" (every node alone and every row as bytes, for checks), or a factory.
        context: What the programs share.
        codec: How rows are encoded.
        upload: What is done to the changes of models before devices send them.
        tile: Devices to compute at once; None lets the engine choose.
        inner_tile: Teams to compute at once; None for all.
        workers: Processes that compute devices; None lets the engine choose.

    Returns:
        The engine. It is not set in the context.

    Raises:
        ValueError: If there is no engine of that name, or if `codec` or `upload` needs the changes of models and the
            method has none.

    Examples:
        >>> import polytier
        >>> federation = polytier.build_federation("digits", devices=8, teams=2)
        >>> with polytier.make_loop(polytier.FedAvg(device_steps=1), federation, "mclr") as loop:
        ...     engine = polytier.make_engine("loopback", loop.context, codec=loop.codec)
        ...     loop.use(engine)
        ...     loop.run(1).rounds
        1
    """
    from polytier.engines.exchange import check_changes

    factory = find_engine(engine)
    check_changes(context, codec, upload)
    return factory(context, codec=codec, upload=upload, tile=tile, inner_tile=inner_tile, workers=workers)
