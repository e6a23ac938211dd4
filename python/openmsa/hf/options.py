"""What convert() may be told, and what the model's config.json keeps under its one key "msa"."""

from __future__ import annotations

import dataclasses

import openmsa


@dataclasses.dataclass(frozen=True)
class MsaOptions:
    block_size: int = 128
    top_k: int = 16
    num_init_blocks: int = 0
    num_local_blocks: int = 1
    dense_layers: tuple[int, ...] = ()  # layers that keep dense attention; an int n given to convert() means the first n
    index_branch: str = "kv_heads"

    @classmethod
    def of(cls, config=None, num_layers: int | None = None, **overrides) -> MsaOptions:
        """From MsaOptions, openmsa.MsaConfig, a dict or nothing, with overrides. An unknown name is an error, never ignored."""
        if config is None:
            values = {}
        elif isinstance(config, cls):
            values = dataclasses.asdict(config)
        elif isinstance(config, openmsa.MsaConfig):
            values = {name: getattr(config, name) for name in ("block_size", "top_k", "num_init_blocks", "num_local_blocks")}
        elif isinstance(config, dict):
            values = dict(config)
        else:
            raise openmsa.InvalidArgumentError(
                f"config is a {type(config).__name__}; give MsaOptions, openmsa.MsaConfig, a dict or None"
            )
        values.update(overrides)
        known = cls.names()
        for name in values:
            if name not in known:
                raise openmsa.InvalidArgumentError(f"unknown MSA option '{name}'; the options are {', '.join(known)}")
        dense = values.get("dense_layers", ())
        values["dense_layers"] = tuple(range(dense)) if isinstance(dense, int) else tuple(sorted(set(dense)))
        options = cls(**values)
        options._check(num_layers)
        return options

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    def to_dict(self) -> dict:
        return {**dataclasses.asdict(self), "dense_layers": list(self.dense_layers)}

    def _check(self, num_layers: int | None) -> None:
        if num_layers is None:
            return
        for layer in self.dense_layers:
            if not 0 <= layer < num_layers:
                raise openmsa.InvalidArgumentError(f"dense_layers names layer {layer}; the model has layers 0 to {num_layers - 1}")
        if len(self.dense_layers) == num_layers:
            raise openmsa.InvalidArgumentError(f"dense_layers names all {num_layers} layers; then nothing is sparse")
