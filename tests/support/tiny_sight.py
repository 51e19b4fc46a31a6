"""Small models that see, in folders as others publish them."""

import json

from tiny_language import SIZES, write
from transformers import AutoModelForImageTextToText, Idefics3Config, Qwen2_5_VLConfig, SmolVLMConfig

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE"
    "{% elif p['type'] == 'video' %}VIDEO{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = ["<picture>", "<place>", "</picture>", "<fake_token_around_image>", "<image>", "<global-img>"]
WORDS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)] + ["<video>"]


def publish(folder, kind, dim=8, thought=""):
    """A folder with a tiny model of this kind that sees, with heads of this size, as transformers writes it. `thought`
    ends each prompt."""
    width = SIZES["num_attention_heads"] * dim
    text = SIZES | {"hidden_size": width, "vocab_size": 120, "max_position_embeddings": 512}
    text |= {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    if kind == "qwen2_5_vl":
        vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 8}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1], "out_hidden_size": width}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [dim // 8, dim // 8, dim // 4]}
        ids = {"vision_start_token_id": 100, "image_token_id": 101, "vision_end_token_id": 102, "video_token_id": 110}
        shape = Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **ids)
        pictures, place = {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 16384}}, WORDS[:3]
    else:
        vision = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_attention_heads": 2}
        vision |= {"num_hidden_layers": 2, "intermediate_size": 48}
        family = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}[kind]
        text |= {"model_type": "llama"}
        shape = family(text_config=text, vision_config=vision, scale_factor=2, image_token_id=104, pad_token_id=0)
        sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        pictures, place = {**sizes, "do_image_splitting": True}, ["<image>"]
    template = TEMPLATE.replace("IMAGE", "".join(place)).replace("[assistant]", f"[assistant]{thought}")
    template = template.replace("VIDEO", "".join(place).replace("<place>", "<video>"))
    write(folder, shape, template, AutoModelForImageTextToText, WORDS)
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return folder
