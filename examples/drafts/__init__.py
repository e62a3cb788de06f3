"""Heads that come with Pilotfish: `package://pilotfish_drafts/NAME`, wherever it is installed."""
