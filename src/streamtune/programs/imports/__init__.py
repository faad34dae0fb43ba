"""Command ``streamtune recipes import``: convert recipes of axolotl, LLaMA-Factory, TRL and ms-swift."""
