"""Image-text data: captions, image files, decoding and multimodal samples."""
