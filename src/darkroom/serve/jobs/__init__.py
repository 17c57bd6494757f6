"""Jobs: admitted, stored durably, watched, completed, and kept for as long as the settings say."""
