"""Inputs that a tiny model can run on, by the signature of its forward and the sizes in its config."""

import inspect
import itertools

import torch

LENGTH, BATCH, GRID, TIME = 9, 2, 4, 64
TEXT = ("input_ids", "decoder_input_ids", "bbox", "lang_ids")
MASKS = ("attention_mask",)


def find(config, *names, default=None):
    """The first of these attributes that is set, in the config or, breadth first, in its sub-configs."""
    level = [config]
    while level:
        for one, name in itertools.product(level, names):
            value = getattr(one, name, None)
            if value is not None and not isinstance(value, dict):
                return value
        level = [
            getattr(c, n)
            for c in level
            for n in (c.sub_configs or {})
            if hasattr(getattr(c, n, None), "to_dict")
        ]
    return default


def number(config, *names, default):
    """As `find`, but the first entry where the attribute is a list."""
    value = find(config, *names, default=default)
    return value[-1] if isinstance(value, (list, tuple)) else value


def noise(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(config, seed=0, length=LENGTH):
    """Token ids `[BATCH, length]` among the ordinary words: above the special ids, below the image ones."""
    text = config.get_text_config()
    size = find(text, "vocab_size", "text_vocab_size", "src_vocab_size") or find(
        config, "vocab_size", default=64
    )
    size = size if isinstance(size, int) else 64
    return torch.randint(
        8, max(9, min(size, 96)), (BATCH, length), generator=torch.Generator().manual_seed(seed)
    )


def image_shape(config):
    """Channels, height, width."""
    size = find(config, "image_size", "img_size", "input_size", "crop_size", default=32)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    return (
        number(config, "num_channels", "in_channels", "in_chans", "num_image_channels", default=3),
        *size[-2:],
    )


def pixels(config):
    """Images, videos (two layouts), flattened patches of a grid (two layouts)."""
    channels, height, width = image_shape(config)
    count = number(config, "num_frames", "frames_per_clip", default=4)
    return [
        noise(BATCH, channels, height, width),
        noise(BATCH, count, channels, height, width),
        *patches(config),
        noise(BATCH, channels, 64, 64),
        noise(BATCH, 1, channels, height, width),
        noise(BATCH, 2, channels, 64, 64),
    ]


def patches(config):
    channels = image_shape(config)[0]
    patch = number(config, "patch_size", default=8)
    times = number(config, "temporal_patch_size", default=1)
    rows = BATCH * GRID * GRID
    return [
        noise(rows, channels * times * patch * patch),
        noise(rows, channels * patch * patch),
        noise(rows, channels, patch, patch),
        noise(BATCH, GRID * GRID, channels * patch * patch),
    ]


def features(config):
    """Spectrograms, both orders of time and bins, and the length an encoder with fixed positions wants."""
    bins = number(
        config,
        "num_mel_bins",
        "input_feat_size",
        "feature_size",
        "feature_projection_input_dim",
        "input_dim",
        "input_feat_per_channel",
        "model_in_dim",
        "input_channels",
        default=16,
    )
    fixed = find(config, "max_source_positions")
    lengths = ([2 * fixed] if fixed else []) + [TIME]
    return [noise(BATCH, *s) for n in lengths for s in ((bins, n), (n, bins))] + [
        noise(BATCH, 1, TIME, bins)
    ]


def hidden(config):
    return noise(BATCH, LENGTH, number(config, "hidden_size", "d_model", default=64))


def waves(config):
    bins = number(config, "num_mel_bins", default=16)
    return [
        noise(BATCH, 3840),
        noise(BATCH, 1, 3840),
        noise(BATCH, number(config, "max_length", default=TIME), bins),
    ]


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


def grid(config):
    return torch.tensor([[1, GRID, GRID]] * BATCH)


MAKERS = {
    "input_ids": lambda c: [words(c)],
    "decoder_input_ids": lambda c: [words(c, seed=7)],
    "qformer_input_ids": lambda c: [words(c, seed=8)],
    "attention_mask": lambda c: [ones(BATCH, LENGTH)],
    "bbox": lambda c: [torch.tensor([1, 2, 11, 12]).repeat(BATCH, LENGTH, 1)],
    "pixel_values": pixels,
    "pixel_values_videos": pixels,
    "input_features": features,
    "input_values": waves,
    "hidden_states": lambda c: [*patches(c), hidden(c)],
    "inputs_embeds": lambda c: [hidden(c)],
    "query_embeds": lambda c: [hidden(c)],
    "grid_thw": lambda c: [grid(c)],
    "image_grid_thw": lambda c: [grid(c)],
    "merge_sizes": lambda c: [torch.tensor([1] * BATCH)],
    "input_features_mask": lambda c: [ones(BATCH, TIME), ones(BATCH, TIME).bool()],
    "pixel_attention_mask": lambda c: [ones(BATCH, GRID * GRID)],
    "spatial_shapes": lambda c: [torch.tensor([[GRID, GRID]] * BATCH)],
    "past_values": lambda c: [
        noise(
            BATCH, find(c, "context_length", default=32), find(c, "num_input_channels", default=1)
        ),
        noise(BATCH, find(c, "context_length", default=32)),
    ],
}


def arguments(model):
    """Names of forward's arguments -> whether they must be given."""
    parameters = inspect.signature(model.forward).parameters
    return {
        n: p.default is p.empty
        for n, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def argument_sets(model):
    """Names to try together, in order: text alone, the main input, pairs, everything."""
    known = {n: must for n, must in arguments(model).items() if n in MAKERS}
    must = {n for n, needed in known.items() if needed}
    main = model.main_input_name
    main = {n for n in (main if isinstance(main, (list, tuple)) else [main]) if n in known}
    text, mask = set(TEXT) & set(known), set(MASKS) & set(known)
    plain = {n for n in known if n in (*TEXT, "pixel_values", "input_features", "input_values")}
    tried = []
    for one in (
        text,
        text | mask,
        main,
        main | text,
        main | text | mask,
        plain,
        plain | mask,
        set(known) - {"inputs_embeds"},
    ):
        one = one | must
        if one and one not in tried:
            tried.append(one)
    return [[n for n in known if n in one] for one in tried]


def attempts(model, config, most=24):
    """Argument dicts to try, at most so many layouts of every set of names."""
    for names in argument_sets(model):
        layouts = itertools.product(*(MAKERS[n](config) for n in names))
        for values in itertools.islice(layouts, most):
            yield dict(zip(names, values, strict=True))
