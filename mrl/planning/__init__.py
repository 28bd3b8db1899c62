"""What a configuration comes to on given devices: memory of every phase, predicted times, the weight sync, and layouts that would fit."""
