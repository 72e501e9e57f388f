"""Pictures of the docs, as SVG that a script makes: they are changed by changing the script."""
