#!lua flags=allow-oom
-- ARGV: unused_us (duration), '1' for the newest snapshot as well.
local head, now = read_head(), clock_us()
if not head then return {'not_found'} end
local used_us = math.max(tonumber(head.updated_us) + tonumber(ARGV[1]), tonumber(head.lease_us))
if used_us > now then return {'in_use'} end
local changes = {retained = thin_retained(head, function() return false end)}
if ARGV[2] == '1' then
  redis.call('UNLINK', snapshot_key)
  changes.snapshot_version, changes.snapshot_position = '0', '0'
  changes.snapshot_bytes, changes.snapshot_checksum = '0', ''
end
write_head(head, changes)
return answer('ok')
