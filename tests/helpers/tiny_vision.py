"""A tiny LLaVA with random weights, and its processor.

python -m tests.helpers.tiny_vision TOKENIZER FOLDER writes both, with the tokenizer of `build_tiny`.
"""

from __future__ import annotations

import sys
from typing import Any

IMAGE = "<image>"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# Each message is a list of pictures and texts.
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"
)


def tokenizer_with_image(folder: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    return tokenizer


def tiny_llava(tokenizer: Any) -> tuple[Any, Any]:
    """The model, in fp32, and its processor, for pictures of 8 x 8 pixels, which are four tokens each."""
    import torch
    import transformers
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    size = {"height": 8, "width": 8}
    processor = transformers.LlavaProcessor(
        LlavaImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=8, **SIZES),
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **ids, **SIZES),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).float(), processor


if __name__ == "__main__":
    for part in tiny_llava(tokenizer_with_image(sys.argv[1])):
        part.save_pretrained(sys.argv[2])
