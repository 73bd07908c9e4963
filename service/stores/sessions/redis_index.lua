-- Put before every script of a tenant's index. KEYS: index (sorted set: session id by creation), sizes (hash: session
-- id -> "created_us:version:bytes:touched_us"), expiry (sorted set: session id by expiry), usage (hash: bytes),
-- expired (sorted set: id of a session whose time ran out, by that time).
-- The sessions' heads are the truth: this is repaired by the next commit, listing or reading of the usage.
local index_key, sizes_key, expiry_key, usage_key, expired_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local REMEMBERED_MS, MAX_REMEMBERED = 30 * 86400 * 1000, 10000 -- ids of expired sessions of a tenant
local SWEEP = 100 -- entries dropped in one call: a script must not hold up the others

local function read_size(session_id)
  local entry = redis.call('HGET', sizes_key, session_id)
  if not entry then return nil end
  local created_us, version, bytes, touched_us = string.match(entry, '^(%d+):(%d+):(%d+):(%d+)$')
  return {
    created_us = tonumber(created_us), version = tonumber(version), bytes = tonumber(bytes),
    touched_us = tonumber(touched_us),
  }
end

local function write_size(session_id, created_us, version, bytes)
  local old = read_size(session_id)
  local entry = table.concat({whole(created_us), whole(version), whole(bytes), whole(clock_us())}, ':')
  redis.call('HSET', sizes_key, session_id, entry)
  redis.call('HINCRBY', usage_key, 'bytes', whole(bytes - (old and old.bytes or 0)))
end

local function forget(session_id)
  local size = read_size(session_id)
  if size then redis.call('HINCRBY', usage_key, 'bytes', whole(-size.bytes)) end
  redis.call('HDEL', sizes_key, session_id)
  redis.call('ZREM', index_key, session_id)
  redis.call('ZREM', expiry_key, session_id)
end

-- A turn that runs at its session's expiry puts the session back with its commit.
local function drop_expired()
  local expired = redis.call('ZRANGE', expiry_key, '-inf', whole(clock_us()), 'BYSCORE', 'LIMIT', 0, SWEEP)
  for _, session_id in ipairs(expired) do
    redis.call('ZADD', expired_key, redis.call('ZSCORE', expiry_key, session_id), session_id)
    forget(session_id)
  end
  if #expired > 0 then
    redis.call('ZREMRANGEBYSCORE', expired_key, '-inf', whole(clock_us() - REMEMBERED_MS * 1000))
    redis.call('ZREMRANGEBYRANK', expired_key, 0, -MAX_REMEMBERED - 1)
    redis.call('PEXPIRE', expired_key, REMEMBERED_MS)
  end
end
