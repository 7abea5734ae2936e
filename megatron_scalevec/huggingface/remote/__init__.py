"""Files that are copied into an export, where ``transformers`` runs them; nothing here imports them."""
