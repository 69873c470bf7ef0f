"""Uses a trained model: predictions, metrics of a labelled file, export. Used by predict.py only.

Nothing else imports this room: delete `fastgpu/predict` and `predict.py` if you do not need it. A checkpoint holds
the model (fastgpu/run/record.py); in a program of your own, with the folder of this project on sys.path, load it
with

    import torch
    from fastgpu.predict.model import load_model

    model, workload, card = load_model("runs/first/checkpoints/best-000001")
    print(card["attributes"]["class_names"], card["metrics"])
    logits = model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))  # rows as they lie in the training file

or, without the project, with your own code of the network:

    card = json.load(open("model.json"))
    safetensors.torch.load_model(my_network(**card["options"]), "model.safetensors")
"""
