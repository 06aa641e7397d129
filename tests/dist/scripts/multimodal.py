"""Trains tiny models of images and sound on rows of uneven length; notes what was computed, and saves.

Usage: multimodal.py RANKS TOKENIZER OUT JOB...; 1 rank is without the line.
"""

import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, folder, out, jobs = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks)

import numpy
import torch
import transformers
from common import SGD, Record, arguments, logged, write_outcome
from datasets import Dataset
from PIL import Image
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import SFTConfig, SFTTrainer

from tests.helpers.tiny_vision import IMAGE, SIZES, tiny_llava, tokenizer_with_image

NUM_ROWS = 11
random = numpy.random.default_rng(3)
tokenizer = tokenizer_with_image(folder)
image_id = tokenizer.convert_tokens_to_ids(IMAGE)
texts = [
    " ".join(["ab", "of", "the", "class", "for"][(i * k + i) % 5] for k in range(2 + i * 5 % 9))
    for i in range(NUM_ROWS)
]


def picture(width, height):
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=numpy.uint8))


def settings(config_class, batch, accumulation, **more):
    usual = {**SGD, "learning_rate": 0.02, "num_train_epochs": 1, "remove_unused_columns": False}
    # Clipping hides a gradient's scale.
    return arguments(out / "checkpoints", batch, accumulation, config_class, max_grad_norm=1e9, **usual, **more)


def trainer_of(name, config, shape, rows, collate, processing, cls=Seq2SeqTrainer, args=Seq2SeqTrainingArguments):
    torch.manual_seed(0)
    return cls(
        model=getattr(transformers, name)(config).float(),
        args=settings(args, *shape),
        train_dataset=rows,
        data_collator=collate,
        processing_class=processing,
    )


def llava(*shape):
    """TRL's own collator for images, with a processor."""
    model, processor = tiny_llava(tokenizer)
    rows = [
        {
            "images": [picture(8, 8) for _ in range(1 + i % 2)],
            "prompt": [{"role": "user", "content": "what"}],
            "completion": [{"role": "assistant", "content": text}],
        }
        for i, text in enumerate(texts)
    ]
    return SFTTrainer(
        model=model,
        args=settings(SFTConfig, *shape, max_length=None),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )


def qwen2_vl(*shape, every=1):
    """Its patches of all pictures lie end to end: a row has as many as its picture is large."""
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "max_position_embeddings": 256, **SIZES}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config={**vision, "temporal_patch_size": 2}, image_token_id=image_id
    )
    images = Qwen2VLImageProcessorPil(min_pixels=64, max_pixels=1024, patch_size=4, merge_size=2)

    def collate(rows):
        given = [row["image"] for row in rows if row["image"] is not None]
        found = images(given, return_tensors="pt") if given else {}
        counts = (found["image_grid_thw"].prod(1) // 4).tolist() if given else []
        texts = [IMAGE * (counts.pop(0) if row["image"] is not None else 0) + row["text"] for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        ids = batch["input_ids"]
        kinds, is_padding = (ids == image_id).int(), batch["attention_mask"] == 0
        labels = ids.masked_fill(is_padding | (kinds == 1), -100)
        return {**batch, **found, "mm_token_type_ids": kinds, "labels": labels}

    pictures = [picture(8 + 8 * (i % 3), 8 + 8 * (i % 2)) if i % every == 0 else None for i in range(NUM_ROWS)]
    rows = [{"image": image, "text": text} for image, text in zip(pictures, texts, strict=True)]
    plain = {"cls": Trainer, "args": transformers.TrainingArguments}
    return trainer_of("Qwen2VLForConditionalGeneration", config, shape, rows, collate, images, **plain)


def mixed(*shape):
    """Few rows have a picture: some ranks leave the vision tower out of a step."""
    return qwen2_vl(*shape, every=6)


# Of an encoder and a decoder for sound.
BOTH = {
    "num_mel_bins": 8,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
}


def whisper(*shape):
    """As Hugging Face's course trains it: features of one length, texts that the collator pads."""
    ids = {n: tokenizer.convert_tokens_to_ids(t) for n, t in tokenizer.special_tokens_map.items() if isinstance(t, str)}
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        max_source_positions=50,
        max_target_positions=64,
        pad_token_id=ids["pad_token"],
        bos_token_id=ids["bos_token"],
        eos_token_id=ids["eos_token"],
        decoder_start_token_id=ids["bos_token"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **BOTH,
    )
    features = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=64)
    rows = []
    for text in texts:
        sound = random.standard_normal(4000 + 1000 * len(text)).astype(numpy.float32)
        of_sound = features(sound, sampling_rate=16000).input_features[0]
        rows.append({"input_features": of_sound, "labels": tokenizer(text).input_ids})

    def collate(rows):
        batch = features.pad([{"input_features": row["input_features"]} for row in rows], return_tensors="pt")
        labels = tokenizer.pad([{"input_ids": row["labels"]} for row in rows], return_tensors="pt")
        batch["labels"] = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
        return batch

    return trainer_of("WhisperForConditionalGeneration", config, shape, rows, collate, features)


def speech(*shape):
    """Text to speech: its labels are frames, its loss is a mean over them, and batch norm reads the micro-batch."""
    config = transformers.SpeechT5Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=8,
        speaker_embedding_dim=4,
        reduction_factor=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **BOTH,
        **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
        **{f"speech_decoder_{where}net_dropout": 0.0 for where in ("pre", "post")},
        **{f"{what}_dropout": 0.0 for what in ("hidden", "attention", "activation", "positional")},
    )

    def collate(rows):
        batch = tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")
        longest = max(len(row["frames"]) for row in rows)
        frames = [numpy.pad(r["frames"], ((0, longest - len(r["frames"])), (0, 0)), constant_values=-100) for r in rows]
        speakers = torch.tensor(numpy.stack([row["speaker"] for row in rows]))
        return {**batch, "labels": torch.tensor(numpy.stack(frames)), "speaker_embeddings": speakers}

    rows = [
        {
            "input_ids": tokenizer(text).input_ids,
            "frames": random.standard_normal((2 * (3 + i % 4), 8)).astype(numpy.float32),
            "speaker": random.standard_normal(4).astype(numpy.float32),
        }
        for i, text in enumerate(texts)
    ]
    return trainer_of("SpeechT5ForTextToSpeech", config, shape, rows, collate, tokenizer)


def row_sums(inputs):
    """A number for each row."""
    labels = inputs["labels"].detach().double()
    return [round(row, 3) for row in labels.masked_fill(labels == -100, 0).flatten(1).sum(1).tolist()]


def run(job):
    kind, shape = job.split(":")
    trainer = globals()[kind](*map(int, shape.split("x")))
    record = Record(trainer, row_sums)
    trainer.train()
    trainer.save_model(str(out / f"{kind}_{shape}"))
    seen = [[step, row] for step, rows in record.steps.items() for row in rows]
    write_outcome(out, job, {**logged(trainer, "grad_norm"), "seen": seen}, trainer.model.named_parameters())


out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
