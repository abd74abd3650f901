"""The validation error of a weights file by timm and webdataset alone: ``accuracy_elsewhere.py FOLDER SHARD...``."""

import json
import sys
from pathlib import Path

import numpy as np
import timm
import torch
import webdataset
from safetensors.torch import load_file
from torchvision import transforms

folder, shards = Path(sys.argv[1]), sys.argv[2:]
model = json.loads((folder / "model.json").read_text())
backbone = timm.create_model(
    model["name"], num_classes=0, checkpoint_path=folder / "backbone.safetensors", **model["timm_kwargs"]
)
head = torch.nn.Linear(model["num_features"], model["num_classes"])
head.load_state_dict(load_file(folder / "head.safetensors"))
network = torch.nn.Sequential(backbone, head).eval()
size = model["image_size"]
resize = [transforms.Resize(size), transforms.CenterCrop(size)]
look = transforms.Compose([*resize, transforms.ToTensor(), transforms.Normalize(model["mean"], model["std"])])
class_of_leaf = np.load(folder / "targets.npy")
wrong = []
for image, leaf in webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("png;jpg", "cls"):
    with torch.no_grad():
        logits = network(look(image)[None])
    wrong.append(int(logits.argmax()) != class_of_leaf[leaf])
sys.stdout.write(json.dumps({"val_error": float(np.mean(wrong)), "num_samples": len(wrong)}))
